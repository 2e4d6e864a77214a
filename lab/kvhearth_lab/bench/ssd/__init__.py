"""The SSD tier against its own drive: what ``kvhearth bench ssd`` measures."""
