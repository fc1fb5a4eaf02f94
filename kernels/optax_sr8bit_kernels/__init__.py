"""How tile functions run on a device: knows no optimizer and no codec."""
