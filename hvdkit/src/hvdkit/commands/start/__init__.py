"""`hvdkit start`: a folder of pictures to a flagfile that trains on them.

start                   the command
tables                  pictures that a table lists
choices                 what is written into the flagfile, each with its reason
measurements            batch and learning rate, measured on the device
"""
