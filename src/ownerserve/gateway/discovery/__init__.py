"""Discovery finds out which workers a gateway has, and goes on finding out.

| module | owns |
|---|---|
| members | what sources say together, and what is to be changed at the roster: pure |
| places | the sources that an operator names, as they are written |
| dns | a name's addresses, looked up again and again |
| slices | whom the endpoint slices of a Kubernetes service name: pure |
| kubernetes | these slices, watched by the official client |
| watching | the tasks: what sources say goes through `members` to the roster |
"""
