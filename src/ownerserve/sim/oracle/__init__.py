"""What could have been: bounds and clairvoyant policies to measure regret against.

    infinite   a fleet whose every device holds all, and moves it free of charge
    horizon    Belady's rule online: when each conversation's next turn comes is known, and what
               lies where; its parts alone
    belady     the fewest tokens computed again, for the order and placement of one replay

In closed loop the order of turns depends on the policy, so `belady` is a bound for one replay and
no optimum over policies.
"""
