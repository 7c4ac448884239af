"""The directory's state machine: what is known, and what each request does to it. Pure."""
