# CUDA C++ to C++: what macros cannot do. Lines stay where they are.

# kernel<<<grid, block>>>(arguments) to kernel % Configuration{grid, block}(arguments), see cuda_runtime.h
s/<<<(.*)>>>\(/ % ::emulation::Configuration{\1}(/

# __shared__ T x[n]; to a reference to the block's variable
s/__shared__ (.*[^ ]) ([A-Za-z_0-9]+)((\[[^]]*\])*);/auto\& \2 = ::emulation::shared<\1\3>();/

# not a macro, because the standard library has attributes of that name
s/__noinline__/__attribute__((noinline))/
