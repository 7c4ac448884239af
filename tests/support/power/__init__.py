"""Power loss, the way file systems are tested: record what a store's life asks of the disk, rebuild
the states that a power cut may leave, open the store on each.

    life      the processes that live: stores, removals, compaction, a shared medium, terms
    trace     their system calls, by strace, as events in order
    volume    what a disk holds after some events, what of it is durable and what is pending
    cuts      the states that a cut may leave, under POSIX and under ext4's ordered journal
    promises  what had been acknowledged by then
    check     the real classes, opened on such a state
    campaign  seeds x states, and what came of them
"""
