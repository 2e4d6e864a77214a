"""`kvhearth hostile`: one attacker after another beside a good client of another tenant."""
