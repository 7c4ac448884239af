"""Traces are workloads as data: readers, synthesizers, statistics.

    readers.read_trace(path)   any known format -> Trace          synth.generate(name, ...) -> Trace
    stats.measure(trace)       what a workload re-uses             write.write_trace(trace, path)
    transform                  scale lengths and gaps, cut, share heads

A trace holds lengths, times and the identity of token blocks, never text. Prefixes are run-length
from the reader to the last statistic: no pass here may cost one step a block.
"""
