"""A step tried before the first one.

trial                   on a few samples at once, and on parts of them
simulated_ranks         ranks that this process stands in for
"""
