"""These families keep recurrent state in some layers or in all; one file each."""
