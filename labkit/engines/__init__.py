"""Engines start, stop and watch ranks; each says where they run. None knows what is trained or drawn."""
