"""The node decides for a worker what state comes back and how, what is put away and when, and who
is let in.

`state` decides (pure), `hosted_state` where an engine owns its blocks; `runtime` performs; `rpc` is
the port to the rest of the fleet. No torch.
"""
