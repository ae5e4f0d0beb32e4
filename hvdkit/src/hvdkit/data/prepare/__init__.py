"""What is done to a data set before a run.

check                   `hvdkit check`: reads every sample, lists the bad ones
pack                    `hvdkit pack`: many small files into a few large ones
arrangement             the samples of a folder of pictures, for `hvdkit start`
scenes                  the demo's data set, made from the pictures in shipped
"""
