"""Networks of papers, to train from scratch or from published weights.

resnet.cifar_resnet         ResNet for pictures of 32 pixels
small_pictures              ResNet-18 and WRN-28-10 for pictures of 28 or 32 pixels
resnet.resnet50             ResNet-50 as Goyal et al. 2017 train it
resnet.resnet50_keras       ResNet-50 of keras.applications
deeplab.deeplabv3plus       DeepLabV3+ on ResNet-50
"""
