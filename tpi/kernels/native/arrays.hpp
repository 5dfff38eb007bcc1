// Python's arrays as checked pointers: an array that is not contiguous, aligned, or of the expected type and shape
// raises.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace tpi {

namespace nb = nanobind;

// Python sees it as tpi.errors.KernelError.
struct KernelError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr Py_ssize_t kAny = -1;
using Dims = std::initializer_list<Py_ssize_t>;  // the expected size of each axis, or kAny

// A borrowed, C-contiguous array. `types` holds the struct codes that are accepted ("f", "fe", ...).
class Array {
public:
    Array(nb::handle object, const char* name, const char* types, Dims shape, bool writable = false)
        : name_(name) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            PyErr_Clear();
            throw KernelError(name_ + " must be a C-contiguous" + (writable ? ", writable" : "") + " array");
        }
        try {
            check(types, shape);
        } catch (...) {
            PyBuffer_Release(&view_);
            throw;
        }
    }
    ~Array() { PyBuffer_Release(&view_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    char type() const { return type_; }
    size_t size(int axis) const { return static_cast<size_t>(view_.shape[axis]); }
    size_t total() const { return static_cast<size_t>(view_.len / view_.itemsize); }
    template <class T> T* as() const { return static_cast<T*>(view_.buf); }

private:
    void check(const char* types, Dims shape) {
        std::string format = view_.format ? view_.format : "B";
        type_ = format.size() == 1 ? format[0] : '?';
        if (std::string(types).find(type_) == std::string::npos)
            throw KernelError(name_ + " has elements of type '" + format + "'; expected one of '" + types + "'");
        bool fits = view_.ndim == static_cast<int>(shape.size());
        int axis = 0;
        for (Py_ssize_t expected : shape) {
            fits = fits && (expected == kAny || view_.shape[axis] == expected);
            ++axis;
        }
        if (!fits) throw KernelError(name_ + " has the shape " + shape_text() + "; expected " + text(shape));
        if (reinterpret_cast<uintptr_t>(view_.buf) % static_cast<size_t>(view_.itemsize) != 0)
            throw KernelError(name_ + " is not aligned to its elements");
    }
    std::string shape_text() const {
        std::vector<Py_ssize_t> shape(view_.shape, view_.shape + view_.ndim);
        return text(shape);
    }
    template <class Shape> static std::string text(const Shape& shape) {
        std::string result = "[";
        for (Py_ssize_t n : shape) {
            if (result.size() > 1) result += ", ";
            result += n == kAny ? "any" : std::to_string(n);
        }
        return result + "]";
    }

    std::string name_;
    Py_buffer view_{};
    char type_ = '?';
};

// The same on the heap, for arrays that are kept.
inline std::unique_ptr<Array> keep_array(nb::handle object, const char* name, const char* types,
                                         Dims shape, bool writable = false) {
    return std::make_unique<Array>(object, name, types, shape, writable);
}

// A small float32 vector that a plan copies; empty for None.
inline std::vector<float> keep_vector(nb::handle object, const char* name, size_t length) {
    if (object.is_none()) return {};
    Array array(object, name, "f", {static_cast<Py_ssize_t>(length)});
    return std::vector<float>(array.as<float>(), array.as<float>() + length);
}

inline const float* or_null(const std::vector<float>& vector) { return vector.empty() ? nullptr : vector.data(); }

// Throws unless every value is an index below `limit`.
inline void check_indices(const Array& array, const char* name, size_t limit) {
    const auto* values = array.as<int32_t>();
    for (size_t i = 0; i < array.total(); ++i)
        if (values[i] < 0 || static_cast<size_t>(values[i]) >= limit)
            throw KernelError(std::string(name) + " " + std::to_string(values[i]) + " is outside 0.." +
                              std::to_string(static_cast<int64_t>(limit) - 1));
}

}  // namespace tpi
