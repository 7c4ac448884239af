"""This package has a simulated node's media and the production `NodeState` that runs over them."""
