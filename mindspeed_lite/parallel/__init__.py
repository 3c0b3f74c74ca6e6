"""Who holds which slice: operators across ranks. Process groups are passed in and never looked up.

cross_entropy    the loss over a vocabulary that is split over a group; the same without materialised logits
"""
