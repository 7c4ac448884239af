"""The directory's state machine is what is known, and what each request does to it. Pure."""
