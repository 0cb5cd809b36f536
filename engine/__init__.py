"""The engine: configuration, checkpoint, model, caches, scheduler, rounds and the engine process."""
