"""The training view: the dataset as trainers of drafters read it, with the report that shows what it is worth."""
