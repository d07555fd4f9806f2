"""A step's packed rows, their inputs on the device, and the interface of runners."""
