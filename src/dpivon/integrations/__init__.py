"""dpivon where people already are. Each module needs the package it is named after, and nothing here imports one.

dpivon.integrations.sklearn    DPIVONClassifier, DPIVONRegressor
dpivon.integrations.lightning  PrivateTraining, a callback               pip install 'dpivon[lightning]'
dpivon.integrations.tracking   tensorboard_log, mlflow_log, PrivateLog  pip install 'dpivon[tensorboard]', 'dpivon[mlflow]'
"""
