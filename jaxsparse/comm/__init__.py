"""Workers: the collectives of JAX, the mesh, and marks of what differs between workers."""
