"""Virtual ranks: shares of a step that are the same on any number of ranks.

passes                  forward and backward passes of the virtual ranks that this rank holds
fixed_point             sums that do not depend on their order
gathered                rows that a loss gathers over virtual ranks
"""
