"""What labels mean, the same for every reader, the augmentation and the tasks."""

IGNORE = 255  # in a label picture: a pixel that neither the loss nor the metrics count


def one_class(folder: object) -> str:
    """What is wrong with a set of pictures where `folder` holds a single class, for a person."""
    return (
        f"{folder} holds one class only, which cannot be told apart from anything: is --data_dir "
        "one level too deep, or too high? A split holds a folder for each class"
    )
