"""`kvatlas view`: a local web app over the stores of runs, made of the report's parts."""
