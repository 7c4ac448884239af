"""This folder is the engine's thread and the asyncio side that submits to it and hears from it."""
