// Shared by all sources: core OpenCL C 1.2, without sub-groups. LANES work-items make a work-group.
#define GROUP 32        // values that share a scale
#define LANES 64        // work-items of a work-group
#define PAGE_TOKENS 32  // tokens of a page of keys and values
#define KERNEL kernel __attribute__((reqd_work_group_size(LANES, 1, 1))) void

typedef global const uchar *Bytes;
typedef global const float *Floats;

// The dot product of 16 int8 with 16 others: four dp4a (sdot4, ...) if the device has them, vectors on a CPU.
static inline int dot16(int4 one, int4 other) {
#if defined(cl_khr_integer_dot_product) && defined(__opencl_c_integer_dot_product_input_4x8bit_packed)
    return dot_4x8packed_ss_int((uint)one.s0, (uint)other.s0) + dot_4x8packed_ss_int((uint)one.s1, (uint)other.s1) +
           dot_4x8packed_ss_int((uint)one.s2, (uint)other.s2) + dot_4x8packed_ss_int((uint)one.s3, (uint)other.s3);
#else
    int16 products = convert_int16(as_char16(one)) * convert_int16(as_char16(other));
    int8 eight = products.lo + products.hi;
    int4 four = eight.lo + eight.hi;
    return four.s0 + four.s1 + four.s2 + four.s3;
#endif
}

// A float16 at any even address.
static inline float half_at(Bytes at, int index) { return vload_half(index, (global const half *)at); }

// Load four floats of a vector of `count` from `at` on; zeros past its end.
static inline float4 floats4(Floats vector, int at, int count) {
    if (at + 4 <= count) return vload4(0, vector + at);
    float4 found = 0.0f;
    if (at < count) found.s0 = vector[at];
    if (at + 1 < count) found.s1 = vector[at + 1];
    if (at + 2 < count) found.s2 = vector[at + 2];
    return found;
}

// Store four floats of a vector of `count` from `at` on; nothing past its end.
static inline void store4(float4 values, global float *vector, int at, int count) {
    if (at + 4 <= count) {
        vstore4(values, 0, vector + at);
        return;
    }
    if (at < count) vector[at] = values.s0;
    if (at + 1 < count) vector[at + 1] = values.s1;
    if (at + 2 < count) vector[at + 2] = values.s2;
}

// The sum of one value of each work-item, for all of them. `scratch` holds LANES floats.
static inline float sum_lanes(float value, local float *scratch) {
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
