"""What a run will take: time, money, disk and memory; and what a node can do."""
