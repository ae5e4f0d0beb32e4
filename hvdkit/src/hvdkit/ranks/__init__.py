"""The ranks: one process each, and what they tell each other outside a step.

world.World         rank, size, and decisions that all ranks take together
world.say           prints on rank 0
proof               who is a rank
messages            gather and broadcast of JSON and arrays; a rank's sign of life
agreement           settings, code, collectives and weights are the same on all ranks; votes
placement           which GPU and which cores each rank takes
start               networks, and how long a rank waits at the start
interrupt           Ctrl-C, SIGTERM, SIGUSR1
stragglers          ranks that the others wait for
peers               ranks that hang
fingerprint         device and builds that the bits depend on
"""
