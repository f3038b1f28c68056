"""What not every model or request needs: each folder is one feature, loaded when asked for."""
