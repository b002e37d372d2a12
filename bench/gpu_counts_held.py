HELD = {}
