"""vitprobe: how does this vision network work?"""
