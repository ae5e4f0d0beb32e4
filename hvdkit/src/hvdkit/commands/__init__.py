"""Commands that run a task or a trained model: main(argv) -> exit code. hvdkit/cli.py lists all.

start       a flagfile for a folder of pictures
browse      samples as the model gets them
evaluate    scores of a checkpoint, of each class, the worst samples
predict     predictions on pictures
seeds       several seeds of one run, their mean and its confidence interval
supervise   a run, started again until it is done
export      a SavedModel that needs none of this code
"""
