// The Python module allreduce._mailbox: messages of float32 values to and from the other nodes of a group. They are
// numbered in the order in which the algorithm, the same on every node, uses them. A node handles a few hundred
// messages per token, and between them other code fills the CPU caches. Handling them in Python would delay each block.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <thread>
#include <tuple>

#include "frames.hpp"
#include "iothread.hpp"
#include "payload.hpp"

namespace nb = nanobind;

namespace tpi {
namespace {

constexpr size_t kShared = 1 << 15;  // payloads above this many bytes are shared by several queues instead of copied
constexpr size_t kLong = 1 << 16;    // this many bytes or more keep the I/O thread busy for long
constexpr auto kRefused = std::chrono::milliseconds(2);  // pause before a frame is offered again to a full queue

// A buffer view of a contiguous float32 array, held for the object's lifetime.
class Values {
public:
    explicit Values(nb::handle array, bool writable = false) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(array.ptr(), &view_, flags)) throw nb::python_error();
        if (view_.format && !std::strcmp(view_.format, "f")) return;
        PyBuffer_Release(&view_);
        throw nb::type_error("a message is an array of float32");
    }
    ~Values() {
        if (view_.obj) PyBuffer_Release(&view_);
    }
    Values(Values&& other) noexcept : view_(std::exchange(other.view_, {})) {}
    Values& operator=(Values&&) = delete;
    float* data() const { return static_cast<float*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len) / sizeof(float); }

private:
    Py_buffer view_;
};

// Encodes and decodes `values`, and adds the result to `out` or overwrites it. `scratch` holds the encoding.
void through_wire(Wire wire, const float* values, size_t count, bool add, float* out, std::vector<uint8_t>& scratch) {
    scratch.resize(payload_bytes(wire, count));
    encode(wire, values, count, scratch.data());
    decode(wire, scratch.data(), count, add, out);
}

// Replaces `values` with the numbers that other nodes decode when they receive them.
void quantise(nb::handle values, uint8_t code) {
    const Values both(values, true);
    std::vector<uint8_t> scratch;
    through_wire(wire_of(code), both.data(), both.size(), false, both.data(), scratch);
}

using Ranks = std::vector<uint32_t>;
using Message = std::tuple<Ranks, uint32_t, nb::object>;  // target ranks, number, values

class Mailbox {
public:
    // The messages of `lane` between the nodes whose ranks are `members`. The methods count ranks within `members`.
    // Messages of more than `segment` values are sent as several frames. At most `in_flight` exchanges are under way at
    // once. While a rank sends or accepts nothing, `late(rank, deadline)` is called repeatedly. `deadline` is 0 at
    // first, then what the last call returned. It raises an exception to end the wait.
    Mailbox(std::shared_ptr<Frames> frames, uint32_t lane, Ranks members, uint32_t segment, uint32_t in_flight,
            nb::callable late)
        : frames_(std::move(frames)), lane_(lane), members_(std::move(members)), segment_(segment),
          in_flight_(in_flight), late_(std::move(late)) {
        frames_->open(lane);
    }
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    // Goes to `step` and drops frames of earlier ones.
    void begin(uint32_t step) {
        number_ = 0;
        under_way_.clear();
        frames_->begin(lane_, step);
    }

    // Begins an exchange of `messages` messages. Returns the number of the first.
    uint32_t reserve(uint32_t messages) {
        const uint32_t first = number_;
        number_ += messages;
        if (number_ > kNumbers) throw std::length_error("a step has more messages than their numbers can count");
        under_way_.push_back(first);
        if (under_way_.size() > in_flight_) under_way_.pop_front();
        frames_->forget_before(lane_, under_way_.front());
        return first;
    }

    // Sends `values` to each of `ranks` as message `number`. `values` may change after it returns.
    void send(const Ranks& ranks, uint32_t number, nb::handle values, uint8_t wire) {
        const Outgoing outgoing{&ranks, number, Values(values)};
        post({&outgoing, 1}, wire_of(wire));
    }

    // Sends several messages. A rank with a full queue does not delay messages to the others.
    void send_all(const std::vector<Message>& messages, uint8_t wire) {
        std::vector<Outgoing> batch;
        batch.reserve(messages.size());
        for (const auto& [ranks, number, values] : messages) batch.push_back({&ranks, number, Values(values)});
        post(batch, wire_of(wire));
    }

    // Writes the values of message `number` from `rank` to `out`.
    void receive(uint32_t rank, uint32_t number, nb::handle out, uint8_t wire) { fetch(rank, number, out, wire, false); }

    // Adds the values of message `number` from `rank` to `total`.
    void add(uint32_t rank, uint32_t number, nb::handle total, uint8_t wire) { fetch(rank, number, total, wire, true); }

    // Writes to `total` the sum of message `number` from all nodes, in rank order. This node's own part is `values`,
    // encoded and decoded as at the other nodes.
    void sum(uint32_t number, nb::handle values, nb::handle total, uint8_t code) {
        const Wire wire = wire_of(code);
        const Values own(values), to(total, true);
        if (own.size() != to.size()) throw std::invalid_argument("the sum and the values differ in size");
        nb::gil_scoped_release unlocked;
        each_segment(to.size(), [&](uint32_t segment, size_t first, size_t count) {
            for (uint32_t rank = 0; rank < members_.size(); ++rank) {
                if (members_[rank] == frames_->rank())
                    deliver_own(wire, own.data() + first, count, rank > 0, to.data() + first);
                else
                    collect(rank, number, segment, wire, count, rank > 0, to.data() + first);
            }
        });
    }

    size_t sent_bytes() const { return sent_; }
    size_t received_bytes() const { return received_; }
    bool failed() const { return failed_; }

    // Ends all waits. Frames that arrive are no longer asked for.
    void close() {
        io_.release();
        late_ = nb::callable();
    }

private:
    struct Outgoing {
        const Ranks* ranks;
        uint32_t number;
        Values values;
    };
    struct Part {  // a segment that one rank has not accepted yet
        const Outgoing* outgoing;
        uint32_t rank, segment;
    };

    template <class Visit>
    void each_segment(size_t count, Visit visit) const {
        if (count > size_t{segment_} * kSegments) throw std::length_error("a message has more values than frames can take");
        for (size_t first = 0, segment = 0; first < count; first += segment_, ++segment)
            visit(static_cast<uint32_t>(segment), first, std::min<size_t>(segment_, count - first));
    }

    void post(std::span<const Outgoing> batch, Wire wire) {
        nb::gil_scoped_release unlocked;
        size_t bytes = 0;
        for (const Outgoing& one : batch) bytes += payload_bytes(wire, one.values.size()) * one.ranks->size();
        bytes < kLong ? io_.follow() : io_.release();
        std::vector<Part> left;
        for (const Outgoing& outgoing : batch)
            each_segment(outgoing.values.size(), [&](uint32_t segment, size_t, size_t) {
                offer(outgoing, segment, *outgoing.ranks, wire, left);
            });
        if (!left.empty()) send_waiting(left, wire);
    }

    // Offers one segment to `ranks`, and adds those that do not accept it now to `left`.
    void offer(const Outgoing& outgoing, uint32_t segment, const Ranks& ranks, Wire wire, std::vector<Part>& left) {
        const size_t first = size_t{segment} * segment_;
        const size_t count = std::min<size_t>(segment_, outgoing.values.size() - first);
        const size_t payload = payload_bytes(wire, count);
        const Header header = frames_->header(lane_, frames_->rank(), outgoing.number, segment, code(wire), count);
        auto frame = [&] {
            Frame made = frames_->make(header, payload);
            encode(wire, outgoing.values.data() + first, count, made.data() + sizeof header);
            return made;
        };
        std::optional<Frame> shared;
        if (ranks.size() > 1 && payload > kShared) shared = frame();
        for (uint32_t rank : ranks) {
            if (frames_->offer(members_.at(rank), shared ? shared->shared() : frame()))
                sent_ += sizeof header + payload;
            else
                left.push_back({&outgoing, rank, segment});
        }
    }

    // Offers the parts in `left` until all are accepted. It stashes arriving frames in the meantime, so that two nodes
    // do not block each other.
    void send_waiting(std::vector<Part>& left, Wire wire) {
        double deadline = 0;
        while (!left.empty()) {
            frames_->drain();
            std::vector<Part> again;
            for (const Part& part : left) {
                auto same = [&](const Part& other) { return other.rank == part.rank; };
                if (std::any_of(again.begin(), again.end(), same))
                    again.push_back(part);
                else
                    offer(*part.outgoing, part.segment, {part.rank}, wire, again);
            }
            if (again.size() < left.size()) {
                deadline = 0;
            } else {
                deadline = late(again.front().rank, deadline);
                std::this_thread::sleep_for(kRefused);
            }
            left = std::move(again);
        }
    }

    void fetch(uint32_t rank, uint32_t number, nb::handle out, uint8_t code, bool add) {
        const Wire wire = wire_of(code);
        const Values to(out, true);
        nb::gil_scoped_release unlocked;
        each_segment(to.size(), [&](uint32_t segment, size_t first, size_t count) {
            collect(rank, number, segment, wire, count, add, to.data() + first);
        });
    }

    // Receives one segment of `count` values, waiting as long as `late_` allows.
    void collect(uint32_t rank, uint32_t number, uint32_t segment, Wire wire, size_t count, bool add, float* out) {
        const Header header = frames_->header(lane_, members_.at(rank), number, segment, code(wire), count);
        const size_t payload = payload_bytes(wire, count);
        double deadline = 0;
        for (;;) {
            if (std::optional<Frame> frame = frames_->take(header, payload)) {
                decode(wire, frame->data() + sizeof header, count, add, out);
                received_ += sizeof header + payload;
                return;
            }
            deadline = late(rank, deadline);
        }
    }

    void deliver_own(Wire wire, const float* values, size_t count, bool add, float* out) {
        if (wire == Wire::f32) return from_f32(reinterpret_cast<const uint8_t*>(values), count, add, out);
        through_wire(wire, values, count, add, out, scratch_);
    }

    double late(uint32_t rank, double deadline) {
        nb::gil_scoped_acquire locked;
        try {
            if (PyErr_CheckSignals()) throw nb::python_error();
            return nb::cast<double>(late_(members_.at(rank), deadline));
        } catch (...) {
            failed_ = true;
            throw;
        }
    }

    static constexpr uint32_t kNumbers = 1u << kNumberBits, kSegments = 1u << kSegmentBits;

    static uint8_t code(Wire wire) { return static_cast<uint8_t>(wire); }

    std::shared_ptr<Frames> frames_;
    IoThread io_;
    uint32_t lane_;
    Ranks members_;
    uint32_t segment_, in_flight_;
    nb::callable late_;
    uint32_t number_ = 0;               // number of the next message in the step
    std::deque<uint32_t> under_way_;    // first message numbers of the exchanges under way
    std::vector<uint8_t> scratch_;
    size_t sent_ = 0, received_ = 0;    // bytes, headers included
    bool failed_ = false;
};

}  // namespace
}  // namespace tpi

NB_MODULE(_mailbox, m) {
    using tpi::Frames, tpi::Mailbox;
    m.def("payload_bytes", [](uint8_t wire, size_t count) { return tpi::payload_bytes(tpi::wire_of(wire), count); },
          nb::arg("wire"), nb::arg("count"));
    m.def("quantise", &tpi::quantise, nb::arg("values"), nb::arg("wire"));
    nb::class_<Frames>(m, "Frames")
        .def(nb::init<const std::string&, uint32_t, uint32_t, uint64_t, uint32_t, double>(), nb::arg("library"),
             nb::arg("rank"), nb::arg("size"), nb::arg("session"), nb::arg("epoch"), nb::arg("spin"))
        .def("connect",
             [](Frames& frames, uint32_t rank, uintptr_t socket, const nb::bytes& name) {
                 frames.connect(rank, reinterpret_cast<void*>(socket), {name.c_str(), name.size()});
             },
             nb::arg("rank"), nb::arg("socket"), nb::arg("name"))
        .def_prop_ro("dropped", &Frames::dropped)
        .def("close", &Frames::close);
    nb::class_<Mailbox>(m, "Mailbox")
        .def(nb::init<std::shared_ptr<Frames>, uint32_t, std::vector<uint32_t>, uint32_t, uint32_t, nb::callable>(),
             nb::arg("frames"), nb::arg("lane"), nb::arg("members"), nb::arg("segment"), nb::arg("in_flight"),
             nb::arg("late"))
        .def("begin", &Mailbox::begin, nb::arg("step"))
        .def("reserve", &Mailbox::reserve, nb::arg("messages"))
        .def("send", &Mailbox::send, nb::arg("ranks"), nb::arg("number"), nb::arg("values"), nb::arg("wire"))
        .def("send_all", &Mailbox::send_all, nb::arg("messages"), nb::arg("wire"))
        .def("receive", &Mailbox::receive, nb::arg("rank"), nb::arg("number"), nb::arg("out"), nb::arg("wire"))
        .def("add", &Mailbox::add, nb::arg("rank"), nb::arg("number"), nb::arg("total"), nb::arg("wire"))
        .def("sum", &Mailbox::sum, nb::arg("number"), nb::arg("values"), nb::arg("total"), nb::arg("wire"))
        .def_prop_ro("sent_bytes", &Mailbox::sent_bytes)
        .def_prop_ro("received_bytes", &Mailbox::received_bytes)
        .def_prop_ro("failed", &Mailbox::failed)
        .def("close", &Mailbox::close);
}
