"""This package is simulated time: the event queue, media as queues, and the turns that are played
on it."""
