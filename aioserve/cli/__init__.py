"""Commands for a person at a terminal, besides serve and the lab: doctor, chat, completion."""
