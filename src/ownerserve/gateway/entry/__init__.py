"""The gateway's side of the entry of turns: it reads what clients say of it, waits, and answers
those who are not let in."""
