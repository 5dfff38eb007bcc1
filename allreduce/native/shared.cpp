// The Python module allreduce._shared: a board in memory that all nodes of a group on one machine have mapped.
// allreduce/algorithms/shared.py is its only caller.
//
// Each node has two places on the board, writes its partials to them in turn, and counts them in its slot. A node that
// has taken sum n knows that all nodes have written partial n, and hence have taken sum n - 1. So the places of n - 1
// are free to be written again. Sum n is complete when n partials of every node have arrived. The node that writes the
// last of them wakes the nodes that sleep.
#include <linux/futex.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>

#include "pause.hpp"

namespace nb = nanobind;

namespace {

using Clock = std::chrono::steady_clock;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Partial = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Total = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// An idle core falls asleep, and waking it takes longer than most waits, especially in a virtual machine. So a wait
// yields its core for this time before it sleeps.
constexpr double kYielding = 1e-3;  // seconds

struct alignas(64) Slot {
    std::atomic<uint32_t> laid;  // partials written by one node so far; wraps around
};
struct alignas(64) Arrivals {
    std::atomic<uint32_t> laid;  // partials written by all nodes; wraps around
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

class Board {
public:
    // Returns the bytes of a board for `size` nodes and partials of up to `values` values.
    static size_t bytes(size_t size, size_t values) {
        return sizeof(Arrivals) + size * (sizeof(Slot) + 2 * values * sizeof(float));
    }

    Board(Bytes memory, size_t rank, size_t size, size_t values)
        : memory_(memory), rank_(rank), size_(size), values_(values) {
        if (!size || rank >= size || !values || memory.size() < bytes(size, values))
            throw std::invalid_argument("the board is too small for its nodes, or the rank is not one of them");
        if (reinterpret_cast<uintptr_t>(memory.data()) % sizeof(Slot))
            throw std::invalid_argument("the board is not aligned to 64 bytes");
    }

    // Writes this node's next partial to the board.
    void lay(const Partial& partial) {
        check(partial.size());
        std::memcpy(place(rank_, next_), partial.data(), partial.size() * sizeof(float));
        slot(rank_).laid.store(++next_, std::memory_order_seq_cst);
        arrivals().laid.fetch_add(1, std::memory_order_seq_cst);
        if (complete() && arrivals().sleepers.load(std::memory_order_seq_cst))
            futex(arrivals().laid, FUTEX_WAKE, INT_MAX, nullptr);
    }

    // Writes to `out` the sum of all nodes' current partials, in rank order, and returns -1. If a node's partial is
    // still missing after `seconds`, returns its rank; call it again then. It polls for `spin` seconds, then yields its
    // core to other threads for kYielding seconds, then sleeps.
    int take(Total& out, double spin, double seconds) {
        check(out.size());
        nb::gil_scoped_release unlocked;
        if (!wait(spin, seconds))
            if (int rank = missing(); rank >= 0) return rank;
        std::memcpy(out.data(), place(0, next_ - 1), out.size() * sizeof(float));
        for (size_t rank = 1; rank < size_; ++rank) {
            const float* partial = place(rank, next_ - 1);
            float* total = out.data();
            for (size_t i = 0; i < out.size(); ++i) total[i] += partial[i];
        }
        return -1;
    }

private:
    void check(size_t values) const {
        if (values > values_) throw std::invalid_argument("the partial is longer than a place on the board");
    }
    Arrivals& arrivals() const { return *reinterpret_cast<Arrivals*>(memory_.data()); }
    Slot& slot(size_t rank) const { return reinterpret_cast<Slot*>(memory_.data() + sizeof(Arrivals))[rank]; }
    float* place(size_t rank, uint32_t number) const {
        auto* places = reinterpret_cast<float*>(memory_.data() + sizeof(Arrivals) + size_ * sizeof(Slot));
        return places + (2 * rank + number % 2) * values_;
    }
    // Returns true if all nodes have written as many partials as this node.
    bool complete() const {
        const auto all = next_ * static_cast<uint32_t>(size_);
        return static_cast<int32_t>(arrivals().laid.load(std::memory_order_seq_cst) - all) >= 0;
    }
    // Returns the first rank that has written fewer partials than this node, or -1 if there is none.
    int missing() const {
        for (size_t rank = 0; rank < size_; ++rank)
            if (static_cast<int32_t>(slot(rank).laid.load(std::memory_order_seq_cst) - next_) < 0)
                return static_cast<int>(rank);
        return -1;
    }

    bool wait(double spin, double seconds) const {
        const auto begin = Clock::now();
        auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
        do {
            for (int polls = 0; polls < 64; ++polls) {
                if (complete()) return true;
                tpi::pause();
            }
        } while (spent() < spin);
        while (spent() < spin + kYielding) {
            sched_yield();
            if (complete()) return true;
        }
        arrivals().sleepers.fetch_add(1, std::memory_order_seq_cst);
        for (double left = seconds - spent(); !complete() && left > 0; left = seconds - spent()) {
            uint32_t seen = arrivals().laid.load(std::memory_order_seq_cst);
            timespec timeout{static_cast<time_t>(left), static_cast<long>((left - static_cast<time_t>(left)) * 1e9)};
            if (!complete()) futex(arrivals().laid, FUTEX_WAIT, seen, &timeout);
        }
        arrivals().sleepers.fetch_sub(1, std::memory_order_seq_cst);
        return complete();
    }

    Bytes memory_;
    size_t rank_, size_, values_;
    uint32_t next_ = 0;  // number of partials that this node has written
};

}  // namespace

// Arrays are not converted, because results written to a converted copy would be lost. Other arrays raise a TypeError.
NB_MODULE(_shared, m) {
    nb::class_<Board>(m, "Board")
        .def(nb::init<Bytes, size_t, size_t, size_t>(), nb::arg("memory").noconvert(), nb::arg("rank"),
             nb::arg("size"), nb::arg("values"))
        .def_static("bytes", &Board::bytes, nb::arg("size"), nb::arg("values"))
        .def("lay", &Board::lay, nb::arg("partial").noconvert())
        .def("take", &Board::take, nb::arg("out").noconvert(), nb::arg("spin"), nb::arg("seconds"));
}
