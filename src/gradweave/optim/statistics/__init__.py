"""What layers see while a model trains, as vectors for the Eva family."""
