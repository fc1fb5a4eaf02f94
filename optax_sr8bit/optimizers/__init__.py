"""The optimizers, one a file; all public names here are public names of the package."""

from optax_sr8bit.optimizers.adafactor import adafactor as adafactor
from optax_sr8bit.optimizers.adagrad import AdagradState as AdagradState, adagrad as adagrad
from optax_sr8bit.optimizers.adam import AdamState as AdamState, adam as adam, adamw as adamw
from optax_sr8bit.optimizers.adan import AdanState as AdanState, adan as adan
from optax_sr8bit.optimizers.ademamix import AdemamixState as AdemamixState, ademamix as ademamix
from optax_sr8bit.optimizers.lamb import LambState as LambState, lamb as lamb
from optax_sr8bit.optimizers.lars import LarsState as LarsState, lars as lars
from optax_sr8bit.optimizers.lion import LionState as LionState, lion as lion
from optax_sr8bit.optimizers.muon import muon as muon
from optax_sr8bit.optimizers.nadam import nadam as nadam, nadamw as nadamw
from optax_sr8bit.optimizers.rmsprop import RmspropState as RmspropState, rmsprop as rmsprop
from optax_sr8bit.optimizers.schedule_free_adamw import (
    schedule_free_adamw as schedule_free_adamw,
    schedule_free_eval_params as schedule_free_eval_params,
)
from optax_sr8bit.optimizers.sgd import SgdState as SgdState, sgd as sgd
