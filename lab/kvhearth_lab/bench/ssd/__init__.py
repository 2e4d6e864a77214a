"""``kvhearth bench ssd``: the SSD tier measured against its own drive."""
