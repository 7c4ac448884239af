"""Who is let in: reservations of a worker's places, and the queue for room on its device. Pure."""
