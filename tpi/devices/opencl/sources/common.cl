// What every source shares. LANES work-items make a work-group; nothing here needs sub-groups.
#define GROUP 32        // values that share a scale
#define LANES 64        // work-items of a work-group
#define PAGE_TOKENS 32  // tokens of a page of keys and values

typedef global const uchar *Bytes;
typedef global const float *Floats;

// `sum` plus the dot product of two words of four int8 each: one instruction where the device has it (dp4a, sdot4).
inline int dot4(int one, int other, int sum) {
#if defined(cl_khr_integer_dot_product) && defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
    return sum + dot_4x8packed_ss_int((uint)one, (uint)other);
#else
    char4 a = as_char4(one), b = as_char4(other);
    return sum + a.s0 * b.s0 + a.s1 * b.s1 + a.s2 * b.s2 + a.s3 * b.s3;
#endif
}

// A float16 at any even address.
inline float half_at(Bytes at, int index) { return vload_half(index, (global const half *)at); }

// Four floats of a vector of `count` from `at` on; zeros past its end.
inline float4 floats4(Floats vector, int at, int count) {
    if (at + 4 <= count) return vload4(0, vector + at);
    float4 found = 0.0f;
    if (at < count) found.s0 = vector[at];
    if (at + 1 < count) found.s1 = vector[at + 1];
    if (at + 2 < count) found.s2 = vector[at + 2];
    return found;
}

// The sum of one value of each work-item, for all of them. `scratch` holds LANES floats.
inline float sum_lanes(float value, local float *scratch) {
    int lane = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[lane] = value;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int reach = LANES / 2; reach > 0; reach /= 2) {
        if (lane < reach) scratch[lane] += scratch[lane + reach];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    return scratch[0];
}
