"""A rank's memory is kept when the rank is killed, and it says where its state lies in it."""
