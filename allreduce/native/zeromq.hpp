// The functions of libzmq that frames need, looked up in the library that pyzmq has loaded. pyzmq's sockets are used
// here, and a second copy of the library could not use them.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace tpi {

constexpr int kDontWait = 1, kSendMore = 2;  // zmq.h
constexpr int kHostUnreachable = EHOSTUNREACH;

class ZeroMq {
public:
    // Finds the functions in pyzmq's extension module at `path` and in its dependencies.
    explicit ZeroMq(const std::string& path) {
        void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (!library) throw std::runtime_error(path + " is not loaded");
        find(library, "zmq_msg_init", msg_init);
        find(library, "zmq_msg_init_size", msg_init_size);
        find(library, "zmq_msg_copy", msg_copy);
        find(library, "zmq_msg_recv", msg_recv);
        find(library, "zmq_msg_send", msg_send);
        find(library, "zmq_msg_close", msg_close);
        find(library, "zmq_msg_data", msg_data);
        find(library, "zmq_msg_size", msg_size);
        find(library, "zmq_msg_more", msg_more);
        find(library, "zmq_send", send);
        find(library, "zmq_errno", error);
    }

    int (*msg_init)(void*);
    int (*msg_init_size)(void*, size_t);
    int (*msg_copy)(void*, void*);
    int (*msg_recv)(void*, void*, int);
    int (*msg_send)(void*, void*, int);
    int (*msg_close)(void*);
    void* (*msg_data)(void*);
    size_t (*msg_size)(const void*);
    int (*msg_more)(const void*);
    int (*send)(void*, const void*, size_t, int);
    int (*error)();

private:
    template <class Function>
    static void find(void* library, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("pyzmq's libzmq has no function ") + name);
    }
};

// A frame. zmq_msg_t is 64 bytes that must not move in memory; moving a `Frame` does not move them.
class Frame {
public:
    explicit Frame(const ZeroMq& zmq) : zmq_(&zmq), message_(new Message) { zmq.msg_init(message_.get()); }
    Frame(const ZeroMq& zmq, size_t size) : zmq_(&zmq), message_(new Message) {
        if (zmq.msg_init_size(message_.get(), size)) throw std::bad_alloc();
    }
    Frame(Frame&&) = default;
    Frame& operator=(Frame&& other) noexcept {
        std::swap(zmq_, other.zmq_);
        std::swap(message_, other.message_);
        return *this;
    }
    ~Frame() {
        if (message_) zmq_->msg_close(message_.get());
    }

    // Receives the next frame of `socket`. Returns 0 or an error number.
    int receive(void* socket, int flags) { return zmq_->msg_recv(message_.get(), socket, flags) < 0 ? zmq_->error() : 0; }

    // Returns another frame that shares the same bytes.
    Frame shared() const {
        Frame other(*zmq_);
        if (zmq_->msg_copy(other.message_.get(), message_.get())) throw std::bad_alloc();
        return other;
    }

    // Sends the frame, which is empty afterwards. Returns 0 or an error number.
    int send(void* socket, int flags) { return zmq_->msg_send(message_.get(), socket, flags) < 0 ? zmq_->error() : 0; }

    uint8_t* data() { return static_cast<uint8_t*>(zmq_->msg_data(message_.get())); }
    const uint8_t* data() const { return static_cast<const uint8_t*>(zmq_->msg_data(message_.get())); }
    size_t size() const { return zmq_->msg_size(message_.get()); }
    bool more() const { return zmq_->msg_more(message_.get()); }

private:
    struct Message {
        alignas(void*) unsigned char bytes[64];
    };
    const ZeroMq* zmq_;
    std::unique_ptr<Message> message_;
};

}  // namespace tpi
