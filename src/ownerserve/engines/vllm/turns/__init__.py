"""What is known of a request that is a turn of ours, and of the prompt that it came with."""
