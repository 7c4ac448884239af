"""A worker's brain: what comes back and how, what is put away and when, who is let in.

`state` decides (pure), `hosted_state` where an engine owns its blocks; `runtime` performs; `rpc` is
the port to the rest of the fleet. No torch.
"""
