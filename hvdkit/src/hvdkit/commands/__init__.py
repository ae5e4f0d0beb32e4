"""Commands besides training, each with main(argv) -> exit code; hvdkit/cli.py lists all.

evaluate, predict, export, serve, browse    what is done with a trained model, or its data
example_files, predict_examples             a model's own inputs and outputs, for these commands
example                                     `hvdkit example`: code to begin with, into the project
start                                       `hvdkit start`: a folder of pictures to a flagfile
jobs                                        commands that start runs: supervise, seeds, sweep
"""
