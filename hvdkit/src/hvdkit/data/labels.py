"""What labels mean, the same for every reader, the augmentation and the tasks."""

IGNORE = 255  # in a label picture: a pixel that loss and metrics leave out


def one_class(folder: object) -> str:
    """A message about a data set where `folder` holds a single class."""
    return (
        f"{folder} holds one class only, which cannot be told apart from anything: is --data_dir "
        "one level too deep, or too high? A split holds a folder for each class"
    )
