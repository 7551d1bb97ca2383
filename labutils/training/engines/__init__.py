"""The same experiment through Hugging Face's Trainer, Accelerate and Lightning Fabric."""
