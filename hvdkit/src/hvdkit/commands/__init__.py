"""Commands besides training, each with main(argv) -> exit code; hvdkit/cli.py lists all.

evaluate, predict, export, serve, browse    what is done with a trained model, or its data
examples, predict_examples                  a model's own inputs and outputs, for these commands
start                                       `hvdkit start`: a folder of pictures to a flagfile
jobs                                        commands that start runs: supervise, seeds, sweep
"""
