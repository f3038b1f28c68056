"""The command `mispredict`: what policies that need predictions lose as these get worse."""
