"""The paper's table at small scale: each technique of DAPO switched on and off, over several seeds."""
