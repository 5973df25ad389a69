"""The main job from end to end on an embedded model: build, attach, measure, show."""
